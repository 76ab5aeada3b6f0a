"""What both ends of a link share: contract, shared memory, verbs, handshake."""
