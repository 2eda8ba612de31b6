"""Engines that share the work of one request: page transfers between prefill and decode."""
