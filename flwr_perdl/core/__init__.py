"""Shared by all packages: argument checks, files, threads, robust averages."""
