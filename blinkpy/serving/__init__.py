"""The processes of a server: `serve`, the engine's process and the front end's."""
