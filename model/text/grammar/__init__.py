"""What a text must look like: JSON schemas, regular expressions, choices and grammars of clients, as constraints."""
