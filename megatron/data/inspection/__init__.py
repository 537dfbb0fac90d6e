"""Looking at data: samples as text or HTML, statistics, and checks of whole sets."""
