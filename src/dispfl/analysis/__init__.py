"""Tables and pictures, made from run directories alone."""
