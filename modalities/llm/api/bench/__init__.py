"""Measure any OpenAI-compatible server: workload, client, statistics, report."""
