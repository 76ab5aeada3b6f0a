"""The common part of both ends of a link: contract, shared memory, verbs, handshake."""
