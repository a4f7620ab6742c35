"""The commands of `forwardscope`: name -> module and description."""

# The function `main` of each module reads `sys.argv`, and `make_parser` makes the parser of its arguments.
COMMANDS = {
    "serve": ("service.commands.serve", "serve a model over HTTP; also runs if only options are given"),
    "chat": ("service.commands.chat", "talk to a running server, or to a model"),
    "drift": ("model.analysis.drift", "compare a faster setting with float32, stage by stage"),
    "compare": ("service.commands.compare", "find the first stage at which two models differ"),
    "harvest": ("service.commands.harvest", "write the activations of texts to files"),
    "mcp": ("service.commands.mcp", "let an assistant examine the model of a running server"),
    "perplexity": ("model.analysis.perplexity", "measure how well a model predicts text files"),
    "train": ("model.training.train", "train a tokenizer and a small model on text files"),
    "doctor": ("service.commands.doctor", "check whether this machine can serve, and say what to do if not"),
    "completion": ("service.commands.completion", "print the completions of these commands for a shell"),
}
