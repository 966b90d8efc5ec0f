"""Tables and messages, each as text and as HTML: pure functions of plain data, and a live display of them."""
