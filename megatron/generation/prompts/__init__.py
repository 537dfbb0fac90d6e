"""Reads prompts and questions from files, and renders conversations as prompts by chat templates."""
