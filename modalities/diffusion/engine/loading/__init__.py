"""Loading of an image model's parts from files of several layouts."""
