"""From a model folder to tensors."""
