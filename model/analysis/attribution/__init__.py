"""Attribution of a logit to its causes: direct attribution, gradients, patching, and the logit lens."""
