"""KTO: answers that are judged desirable or undesirable."""
