"""Language-model tasks: models, prompts, encoding and scores. Importing this package imports no torch."""
