"""Families of recognizers on transformers' classes: one small module for each."""
