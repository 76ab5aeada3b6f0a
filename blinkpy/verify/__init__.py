"""What judges the scheduler, before and after serving."""
