"""What a logit depends on: direct attribution, gradients, patching, and the logit lens."""
