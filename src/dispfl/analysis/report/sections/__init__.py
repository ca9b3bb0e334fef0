"""The sections of the page, one module each: from results to a piece of HTML."""
