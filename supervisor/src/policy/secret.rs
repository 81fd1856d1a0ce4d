//! What a policy says about a secret: where its value comes from, where it may go, and in which place of a request.
//!
//! Nothing here holds a value. The run's program is given a placeholder; see [`crate::world::secrets`].

use crate::{chain::admission::Host, effect::http::Scheme};
use std::{fmt, path::PathBuf, time::Duration};

/// A secret as a policy names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secret {
    /// Its name, which is also the variable that holds its placeholder in the jail.
    pub name: String,
    /// Where its value comes from.
    pub from: SecretSource,
    /// The origins that it may be sent to.
    pub to: Vec<SecretOrigin>,
    /// The places of a request that it may stand in.
    pub places: Vec<SecretPlace>,
    /// The methods of requests that may carry it; empty for any.
    pub methods: Vec<String>,
    /// How often it may be used.
    pub rate: Option<SecretRate>,
    /// Whether a person is asked about each request that carries it.
    pub ask: bool,
}

/// Where a value comes from, on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretSource {
    /// A variable of the caller's environment.
    Env(String),
    /// A file; one line break at its end is not part of the value.
    File(PathBuf),
    /// A credential that systemd passed to the service (systemd.exec(5), `LoadCredential=`).
    Credential(String),
    /// A user's name and password, encoded for the Basic scheme (RFC 7617).
    Basic {
        /// The name.
        user: String,
        /// The password.
        password: Box<SecretSource>,
    },
}

impl fmt::Display for SecretSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SecretSource::Env(name) => write!(f, "the variable {name}"),
            SecretSource::File(path) => write!(f, "the file {}", path.display()),
            SecretSource::Credential(name) => write!(f, "the credential {name}"),
            SecretSource::Basic { user, password } => write!(f, "the user {user} with {password}"),
        }
    }
}

/// A scheme, host and port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretOrigin {
    /// The scheme.
    pub scheme: Scheme,
    /// The host in its canonical form.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl SecretOrigin {
    /// Reads `https://host` or `https://host:port`.
    ///
    /// # Errors
    ///
    /// What is wrong with it, as the end of a sentence about it.
    pub fn parse(text: &str) -> Result<SecretOrigin, String> {
        let (scheme, rest) = match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
            (Some(rest), _) => (Scheme::Https, rest),
            (None, Some(rest)) => (Scheme::Http, rest),
            (None, None) => return Err("has no scheme; write it as `https://api.example.org`".to_owned()),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = match rest.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                let port = crate::chain::admission::port_number(port).ok_or("has no port that is a number")?;
                (host, port)
            }
            _ => (rest, scheme.default_port()),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let host = Host::parse(host).map_err(|error| format!("has no host: {error}"))?;
        Ok(SecretOrigin { scheme, host: host.to_string(), port })
    }
}

impl fmt::Display for SecretOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, crate::effect::net::bracketed(&self.host))?;
        match self.port == self.scheme.default_port() {
            true => Ok(()),
            false => write!(f, ":{}", self.port),
        }
    }
}

/// A place of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretPlace {
    /// The value of this header, its name in lower case.
    Header(String),
    /// The value of this parameter of the query.
    Query(String),
    /// The content.
    Body,
}

impl SecretPlace {
    /// Reads `header:NAME`, `query:NAME` or `body`.
    ///
    /// # Errors
    ///
    /// What is wrong with it, as the end of a sentence about it.
    pub fn parse(text: &str) -> Result<SecretPlace, String> {
        let named = |name: &str| {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            (!name.is_empty() && name.bytes().all(plain)).then(|| name.to_owned()).ok_or("has no name that can be one")
        };
        match text.split_once(':') {
            Some(("header", name)) => Ok(SecretPlace::Header(named(name)?.to_ascii_lowercase())),
            Some(("query", name)) => Ok(SecretPlace::Query(named(name)?)),
            None if text == "body" => Ok(SecretPlace::Body),
            _ => Err("is no place; write `header:NAME`, `query:NAME` or `body`".to_owned()),
        }
    }
}

impl fmt::Display for SecretPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SecretPlace::Header(name) => write!(f, "header:{name}"),
            SecretPlace::Query(name) => write!(f, "query:{name}"),
            SecretPlace::Body => f.write_str("body"),
        }
    }
}

/// So often within a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecretRate {
    /// How many requests.
    pub most: u32,
    /// Within this time.
    pub within: Duration,
}

impl SecretRate {
    /// Reads `60/min`: a count and one of `s`, `min`, `h`.
    ///
    /// # Errors
    ///
    /// What is wrong with it, as the end of a sentence about it.
    pub fn parse(text: &str) -> Result<SecretRate, String> {
        let wrong = "is no rate; write it as `60/min`, with `s`, `min` or `h`";
        let (count, unit) = text.split_once('/').ok_or(wrong)?;
        let within = match unit.trim() {
            "s" => 1,
            "min" => 60,
            "h" => 3600,
            _ => return Err(wrong.to_owned()),
        };
        let most = count.trim().parse().ok().filter(|count| *count > 0).ok_or(wrong)?;
        Ok(SecretRate { most, within: Duration::from_secs(within) })
    }
}

impl Secret {
    /// All that it says, in one line that holds no value: part of a policy's digest.
    pub fn text(&self) -> String {
        let list = |items: Vec<String>| items.join(" ");
        format!(
            "{} from {} to {} in {} by {} at {:?} ask {}",
            self.name,
            self.from,
            list(self.to.iter().map(ToString::to_string).collect()),
            list(self.places.iter().map(ToString::to_string).collect()),
            list(self.methods.clone()),
            self.rate.map(|rate| (rate.most, rate.within.as_secs())),
            self.ask
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_places_and_rates_have_one_form() {
        assert_eq!(SecretOrigin::parse("https://API.test.").unwrap().to_string(), "https://api.test");
        assert_eq!(SecretOrigin::parse("http://api.test:8080/").unwrap().to_string(), "http://api.test:8080");
        assert_eq!(SecretOrigin::parse("https://[::1]:8443").unwrap().to_string(), "https://[::1]:8443");
        for bad in ["api.test", "https://", "https://a/b", "https://*.test", "ftp://a", "https://u@a.test"] {
            assert!(SecretOrigin::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(SecretPlace::parse("header:Authorization"), Ok(SecretPlace::Header("authorization".into())));
        assert_eq!(SecretPlace::parse("query:key"), Ok(SecretPlace::Query("key".into())));
        assert_eq!(SecretPlace::parse("body"), Ok(SecretPlace::Body));
        for bad in ["header:", "cookie:a", "header:a b", "", "body:x"] {
            assert!(SecretPlace::parse(bad).is_err(), "{bad}");
        }
        let minute = SecretRate { most: 60, within: Duration::from_secs(60) };
        assert_eq!(SecretRate::parse("60/min"), Ok(minute));
        assert!(SecretRate::parse("0/s").is_err() && SecretRate::parse("5").is_err());
    }
}
