//! Helpers shared by the end-to-end tests: build outputs, scratch folders, a second user, observers outside the jail.
