"""Constraints on texts, from the JSON schemas, regular expressions, choices and grammars of clients."""
