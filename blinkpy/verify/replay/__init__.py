"""What is made of a recording: replay, narration, timeline, requests."""
