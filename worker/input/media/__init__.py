"""Images and videos: decoding, and preprocessing as upstream's processors do it."""
