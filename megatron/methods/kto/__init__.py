"""KTO: learns from single answers that are judged desirable or undesirable."""
