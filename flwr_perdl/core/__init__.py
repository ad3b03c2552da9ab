"""What every room may use: checks of arguments, files, threads, averages that withstand liars."""
