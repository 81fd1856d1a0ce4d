//! Names and the addresses that stand for them inside one run.
//!
//! A program that asks for a name gets an address of a reserved range, one for each name, which means that name and
//! nothing else. So a connection says where it is meant to go, whatever the program's language or library, and no
//! question leaves the machine before a connection is admitted.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// Where a run's name server is, inside its jail. In the range for benchmarks (RFC 2544, RFC 6890), which no network
/// routes.
pub const NAME_SERVER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);

/// The first address that stands for a name.
const FIRST_V4: u32 = u32::from_be_bytes([198, 18, 1, 0]);

/// The network of the IPv6 addresses that stand for names: a unique local prefix of our own (RFC 4193).
const NETWORK_V6: [u16; 4] = [0xfd54, 0x6f6c, 0x6c67, 0x6174];

/// So many names one run may ask for. 198.18.0.0/15 has room for twice as many; a program that asks for more is
/// looking for a way to fill our memory.
pub const MAX_NAMES: usize = 65_000;

/// The longest name, in characters without the dot at its end (RFC 1035, section 2.3.4).
const MAX_NAME: usize = 253;

/// The names that a run has asked for.
#[derive(Debug, Default)]
pub struct Names {
    numbers: HashMap<String, u32>,
    names: Vec<String>,
}

/// The addresses of one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Its IPv4 address.
    pub v4: Ipv4Addr,
    /// Its IPv6 address.
    pub v6: Ipv6Addr,
}

/// A run asked for more than [`MAX_NAMES`] names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the run asked for more than {MAX_NAMES} names")]
pub struct TooMany;

impl Names {
    /// Whether this name has its addresses already.
    pub fn knows(&self, name: &str) -> bool {
        self.numbers.contains_key(name)
    }

    /// The addresses that stand for a name in its canonical form, now and as long as the run lives.
    ///
    /// # Errors
    ///
    /// [`TooMany`].
    pub fn addresses_of(&mut self, name: &str) -> Result<Addresses, TooMany> {
        if let Some(number) = self.numbers.get(name) {
            return Ok(Addresses::of(*number));
        }
        let number = u32::try_from(self.names.len()).map_err(|_| TooMany)?;
        if self.names.len() >= MAX_NAMES {
            return Err(TooMany);
        }
        self.numbers.insert(name.to_owned(), number);
        self.names.push(name.to_owned());
        Ok(Addresses::of(number))
    }

    /// The name that an address stands for; none for an address of another range, or of a name nobody asked for.
    pub fn name_of(&self, address: IpAddr) -> Option<&str> {
        let number = match address {
            IpAddr::V4(address) => u32::from(address).checked_sub(FIRST_V4)?,
            IpAddr::V6(address) => {
                let parts = address.segments();
                if parts[..4] != NETWORK_V6 || parts[4..6] != [0, 0] {
                    return None;
                }
                (u32::from(parts[6]) << 16 | u32::from(parts[7])).checked_sub(1)?
            }
        };
        self.names.get(usize::try_from(number).ok()?).map(String::as_str)
    }
}

impl Addresses {
    fn of(number: u32) -> Addresses {
        let [a, b, c, d] = NETWORK_V6;
        let last = number + 1;
        Addresses {
            v4: Ipv4Addr::from(FIRST_V4 + number),
            v6: Ipv6Addr::new(a, b, c, d, 0, 0, (last >> 16) as u16, (last & 0xffff) as u16),
        }
    }
}

/// A host's canonical form: lower case, without the dot at its end. None for what is no name: empty or too long as a
/// whole or in a label, or with a character that no host has (RFC 1123, section 2.1, and the underscore, which services
/// use).
pub fn canonical_host(host: &str) -> Option<String> {
    let host = host.strip_suffix('.').unwrap_or(host);
    let fits = |label: &str| (1..=63).contains(&label.len());
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let valid = host.len() <= MAX_NAME && host.split('.').all(|label| fits(label) && label.bytes().all(plain));
    valid.then(|| host.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_name_keeps_its_addresses_and_they_lead_back_to_it() {
        let mut names = Names::default();
        let (one, two) = (names.addresses_of("one.test").unwrap(), names.addresses_of("two.test").unwrap());
        assert_ne!(one, two);
        assert_eq!(names.addresses_of("one.test"), Ok(one));
        assert_eq!(names.name_of(one.v4.into()), Some("one.test"));
        assert_eq!(names.name_of(two.v6.into()), Some("two.test"));
    }

    #[test]
    fn other_addresses_lead_to_no_name() {
        let mut names = Names::default();
        let _ = names.addresses_of("one.test").unwrap();
        for other in ["198.18.0.1", "198.18.1.1", "10.0.0.1", "255.255.255.255", "::1", "fd54:6f6c:6c67:6174::"] {
            assert_eq!(names.name_of(other.parse().unwrap()), None, "{other}");
        }
        assert_eq!(names.name_of("fd54:6f6c:6c67:6174:1::1".parse().unwrap()), None);
    }

    #[test]
    fn a_run_cannot_fill_the_memory_with_names() {
        let mut names = Names::default();
        for number in 0..MAX_NAMES {
            names.addresses_of(&format!("n{number}.test")).unwrap();
        }
        assert_eq!(names.addresses_of("one-more.test"), Err(TooMany));
        assert!(names.addresses_of("n0.test").is_ok());
        let last = names.addresses_of(&format!("n{}.test", MAX_NAMES - 1)).unwrap();
        assert!(last.v4 < Ipv4Addr::new(198, 20, 0, 0), "the range ends there: {last:?}");
    }

    #[test]
    fn a_host_has_one_form() {
        assert_eq!(canonical_host("API.Test."), Some("api.test".to_owned()));
        assert_eq!(canonical_host("_srv.x-y.test"), Some("_srv.x-y.test".to_owned()));
        let long = "a".repeat(64);
        for bad in ["", ".", "a..b", ".a", "a b", "a/b", "a:1", "\u{e9}.test", "[::1]", long.as_str()] {
            assert_eq!(canonical_host(bad), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn the_canonical_form_is_its_own(host in ".{0,80}") {
            if let Some(form) = canonical_host(&host) {
                prop_assert_eq!(canonical_host(&form), Some(form));
            }
        }
    }
}
