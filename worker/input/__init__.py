"""Input processing: from a request to tokens, images and grammars, on the preparation threads."""
