"""The common part of both sides of a link: contract, shared memory, verbs, handshake."""
