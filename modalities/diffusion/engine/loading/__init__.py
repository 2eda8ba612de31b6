"""An image model's parts from files, whatever their layout."""
