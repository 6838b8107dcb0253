"""How the pocket model was made: dialogues synthesized from a seed, training, evaluation, export."""
