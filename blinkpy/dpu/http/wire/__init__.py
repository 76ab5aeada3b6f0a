"""Sockets, TLS, connections and HTTP messages, and their limits."""
