"""The storage engines of this package inside other serving systems."""
