"""The front end's end of a link."""
