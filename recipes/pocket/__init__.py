"""Recipe of the pocket model: dialogues synthesized from a seed, training, evaluation, export."""
