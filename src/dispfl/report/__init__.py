"""Tables, plots and HTML reports, made from run directories alone."""
