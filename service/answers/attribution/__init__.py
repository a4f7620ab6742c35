"""The methods of POST /attribute: for each, how its request is checked, computed and described."""
