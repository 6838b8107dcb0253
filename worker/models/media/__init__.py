"""Images and videos: decoding, preprocessing as upstream's processors do it, and loading the vision tower."""
