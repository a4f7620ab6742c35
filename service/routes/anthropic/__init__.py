"""The endpoints of Anthropic's API, in the form of answers that the `anthropic` SDK reads."""
