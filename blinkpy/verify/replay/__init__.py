"""Uses of a recording: replay, narration, timeline, requests."""
