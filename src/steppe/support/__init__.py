"""Small things that every room may use: errors in one line, whole files, devices, t quantiles. It knows no room."""
