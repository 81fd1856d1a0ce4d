//! Which hosts a rule is about.
//!
//! Names are compared without regard to case and to a dot at their end; addresses as values, so that an IPv4 address
//! and the same one mapped into IPv6 are one. A text that is neither a name nor an address in a spelling of its own
//! (`127.1`, `0x7f000001`, `2130706433`) is no host at all: what one program takes for a name another takes for an
//! address, so it matches no pattern and no rule can admit it.

use std::{fmt, net::IpAddr};

/// The longest name that DNS has: RFC 1035, section 2.3.4, without the dot at its end.
const MOST_NAME: usize = 253;
/// The longest label: the same section.
const MOST_LABEL: usize = 63;

/// A host in its one form.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Host {
    /// A name: lower case, no dot at the end.
    Name(String),
    /// An address; IPv4 that was mapped into IPv6 as IPv4.
    Address(IpAddr),
}

/// Why a text is no host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// Nothing.
    #[error("a host has a name")]
    Empty,
    /// Letters that no name has.
    #[error("a name has letters, digits, `-` and `_`, with single dots between; other scripts are written as `xn--…`")]
    NotAName,
    /// Longer than a name can be.
    #[error("a name has at most 253 letters, and 63 between two dots")]
    TooLong,
    /// An address in a spelling that only some programs read.
    #[error("a name does not end in a number, and an IPv4 address is four decimal numbers without zeros before them")]
    OddAddress,
    /// A star where none can be.
    #[error("`*.` stands at the start, before a name, and nowhere else")]
    Star,
}

impl Host {
    /// Reads a host: a name, an IPv4 address, or an IPv6 address with or without brackets.
    ///
    /// # Errors
    /// Why it is none.
    pub fn parse(text: &str) -> Result<Host, HostError> {
        let inner = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        if let Ok(address) = inner.unwrap_or(text).parse::<IpAddr>() {
            return match (inner, address) {
                (Some(_), IpAddr::V4(_)) => Err(HostError::NotAName),
                (_, address) => Ok(Host::Address(address.to_canonical())),
            };
        }
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        check_name(&name)?;
        Ok(Host::Name(name))
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Name(name) => f.write_str(name),
            Host::Address(address) => address.fmt(f),
        }
    }
}

/// Checks a name in lower case and without a dot at its end.
fn check_name(name: &str) -> Result<(), HostError> {
    if name.is_empty() {
        return Err(HostError::Empty);
    }
    let plain = |label: &str| {
        !label.is_empty() && label.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'))
    };
    if !name.split('.').all(plain) {
        return Err(HostError::NotAName);
    }
    if name.len() > MOST_NAME || name.split('.').any(|label| label.len() > MOST_LABEL) {
        return Err(HostError::TooLong);
    }
    // URL Standard, "ends in a number checker": such a text is read as an IPv4 address or as nothing.
    let last = name.rsplit('.').next().unwrap_or_default();
    let hexadecimal =
        last.strip_prefix("0x").is_some_and(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
    match hexadecimal || last.bytes().all(|digit| digit.is_ascii_digit()) {
        true => Err(HostError::OddAddress),
        false => Ok(()),
    }
}

/// One pattern of hosts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostPattern {
    /// This one.
    Exactly(Host),
    /// Every name below this one, at any depth, and not the name itself.
    Below(String),
}

impl HostPattern {
    /// Reads a pattern: a host, or `*.` and a name.
    ///
    /// # Errors
    /// Why it is none.
    pub fn parse(text: &str) -> Result<HostPattern, HostError> {
        match text.strip_prefix("*.") {
            Some(suffix) => match Host::parse(suffix)? {
                Host::Name(suffix) => Ok(HostPattern::Below(suffix)),
                Host::Address(_) => Err(HostError::Star),
            },
            None if text.contains('*') => Err(HostError::Star),
            None => Ok(HostPattern::Exactly(Host::parse(text)?)),
        }
    }

    /// Whether it matches this host.
    pub fn matches(&self, host: &Host) -> bool {
        match (self, host) {
            (HostPattern::Exactly(one), other) => one == other,
            (HostPattern::Below(suffix), Host::Name(name)) => is_below(name, suffix),
            (HostPattern::Below(_), Host::Address(_)) => false,
        }
    }

    /// Whether some host matches both.
    pub fn overlaps(&self, other: &HostPattern) -> bool {
        match (self, other) {
            (HostPattern::Exactly(host), pattern) | (pattern, HostPattern::Exactly(host)) => pattern.matches(host),
            (HostPattern::Below(one), HostPattern::Below(other)) => {
                one == other || is_below(one, other) || is_below(other, one)
            }
        }
    }
}

/// Whether a name lies below a suffix: whole labels, and at least one of them.
fn is_below(name: &str, suffix: &str) -> bool {
    name.strip_suffix(suffix).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostPattern::Exactly(host) => host.fmt(f),
            HostPattern::Below(suffix) => write!(f, "*.{suffix}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host(text: &str) -> Host {
        Host::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn a_host_has_one_form() {
        for (text, form) in [
            ("api.test", "api.test"),
            ("API.Test.", "api.test"),
            ("_dmarc.x-y.test", "_dmarc.x-y.test"),
            ("xn--bcher-kva.test", "xn--bcher-kva.test"),
            ("127.0.0.1", "127.0.0.1"),
            ("::1", "::1"),
            ("[::1]", "::1"),
            ("0:0:0:0:0:0:0:1", "::1"),
            ("::ffff:127.0.0.1", "127.0.0.1"),
            ("2001:DB8::1", "2001:db8::1"),
        ] {
            assert_eq!(host(text).to_string(), form);
        }
    }

    #[test]
    fn what_only_some_programs_read_as_an_address_is_no_host() {
        for text in [
            "127.1",
            "127.0.1",
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "0177.0.0.1",
            "127.0.0.01",
            "127.0.0.1.",
            "1.2.3.4.5",
            "256.1.1.1",
            "api.1",
            "api.0x",
            "0",
            "api.0x1f.",
            "0X7F.0.0.1",
        ] {
            assert_eq!(Host::parse(text), Err(HostError::OddAddress), "{text}");
        }
    }

    #[test]
    fn what_is_no_name_is_no_host() {
        for text in [
            "",
            ".",
            "..",
            "a..b",
            ".a",
            "a b",
            "a/b",
            "a:80",
            "a@b",
            "bücher.test",
            "a\0b",
            "fe80::1%eth0",
            "[::1",
            "[127.0.0.1]",
            "a.test..",
            "*",
            "a*b",
            "::1]",
            "%61pi.test",
            "a\\b",
            "a.test\n",
        ] {
            assert!(Host::parse(text).is_err(), "{text:?}");
        }
        assert_eq!(Host::parse(&"a".repeat(64)), Err(HostError::TooLong));
        assert_eq!(Host::parse(&format!("{}b", "a.".repeat(127))), Err(HostError::TooLong));
    }

    #[test]
    fn a_suffix_matches_what_lies_below_it_alone() {
        let pattern = HostPattern::parse("*.Corp.Test.").unwrap();
        for (name, expected) in [
            ("a.corp.test", true),
            ("a.b.CORP.test.", true),
            ("corp.test", false),
            ("evilcorp.test", false),
            ("a.evilcorp.test", false),
            ("corp.test.evil.test", false),
            ("a.corp.test.evil.test", false),
            ("test", false),
        ] {
            assert_eq!(pattern.matches(&host(name)), expected, "{name}");
        }
        assert!(!HostPattern::parse("*.0.1").is_ok_and(|pattern| pattern.matches(&host("127.0.0.1"))));
        for text in ["*", "*.", "*a.test", "a.*.test", "a.*", "*.*.test", "**.test", "*.127.0.0.1", "*.::1"] {
            assert!(HostPattern::parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_pattern_of_one_host_matches_every_spelling_of_it_and_no_other(
            name in "[a-z]{1,3}(\\.[a-z]{1,3}){0,2}", other in "[a-z]{1,3}(\\.[a-z]{1,3}){0,2}",
        ) {
            let pattern = HostPattern::parse(&name).unwrap();
            let shouted = format!("{}.", name.to_uppercase());
            prop_assert!(pattern.matches(&host(&shouted)));
            prop_assert_eq!(pattern.matches(&host(&other)), name == other);
        }

        #[test]
        fn nothing_that_is_read_as_a_host_is_read_otherwise_again(text in "\\PC{0,12}") {
            if let Ok(host) = Host::parse(&text) {
                prop_assert_eq!(Host::parse(&host.to_string()), Ok(host));
            }
        }

        #[test]
        fn patterns_that_share_a_host_overlap(
            one in "(\\*\\.)?[ab](\\.[ab]){0,2}", other in "(\\*\\.)?[ab](\\.[ab]){0,2}", name in "[ab](\\.[ab]){0,3}",
        ) {
            let (one, other) = (HostPattern::parse(&one).unwrap(), HostPattern::parse(&other).unwrap());
            prop_assert_eq!(one.overlaps(&other), other.overlaps(&one));
            if one.matches(&host(&name)) && other.matches(&host(&name)) {
                prop_assert!(one.overlaps(&other));
            }
        }
    }
}
