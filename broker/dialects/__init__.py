"""What several APIs share, pure: parts of bodies -> parts of `Generate`, and base renderers."""
