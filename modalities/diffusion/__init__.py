"""Images. Importing this package loads neither torch nor diffusers."""
