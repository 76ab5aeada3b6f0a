"""The processes of a server: what `serve` starts and watches, the engine's process and the front end's."""
