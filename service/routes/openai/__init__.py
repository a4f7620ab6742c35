"""The endpoints of OpenAI's API, in the form of answers that the `openai` SDK reads."""
