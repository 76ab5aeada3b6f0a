"""Expert layers: routing and the experts' products."""
