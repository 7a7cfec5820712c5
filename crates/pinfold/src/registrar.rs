//! Registrars: who turns a range into a registration.
