"""Metrics, logs, traces and the live page of a front end."""
