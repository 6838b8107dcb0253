"""Process supervisor in the foreground: a pure lifecycle, and the code that carries out its decisions."""
