//! HTTP requests that leave the jail by the network door.
//!
//! A body never travels in an effect: its digest and size do where the door held it whole, and what was announced where
//! it streams.

use super::{Class, Declaration, Digest, Door, FaultKind, FaultShape, Idempotency, Kind, Resource, Size, StandIn};
use serde::{Deserialize, Serialize};
use std::fmt;

const fn shape(kind: FaultKind, arrives: &'static [&'static str]) -> FaultShape {
    FaultShape { kind, doors: &[Door::Network], arrives }
}

const FAULTS: &[FaultShape] = &[
    shape(FaultKind::Error, &["ECONNRESET"]),
    shape(FaultKind::Timeout, &["ETIMEDOUT"]),
    shape(FaultKind::RateLimit, &["429", "503"]),
    shape(FaultKind::Truncated, &["a shorter body"]),
    shape(FaultKind::Corrupted, &["a body with one byte changed"]),
    shape(FaultKind::Cut, &["a body that breaks off"]),
];

/// A request to a server outside the jail.
///
/// Declared as what its strictest method is; [`idempotency_of`] says it for each.
pub const REQUEST: Declaration = Declaration {
    kind: Kind::HttpRequest,
    name: "http/request",
    classes: &[Class::Network, Class::Egress],
    idempotency: Idempotency::Once,
    resource: "a URL: scheme, host, port unless it is the scheme's own, path and query as sent",
    summary:
        "Make an HTTP request to a server outside the jail; GET, HEAD, OPTIONS, TRACE, PUT and DELETE are idempotent.",
    at_api_door: false,
    stand_in: StandIn::Done,
    size: Size::Content,
    faults: FAULTS,
};

/// The methods that may be repeated, RFC 9110, section 9.2.2. Names of methods are case-sensitive (section 9.1), so `get`
/// is another method than `GET`, and one that nobody knows.
pub const IDEMPOTENT_METHODS: &[&str] = &["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"];

/// Whether a request of this method may be made twice. What is not known to be idempotent is not.
pub fn idempotency_of(method: &str) -> Idempotency {
    match IDEMPOTENT_METHODS.contains(&method) {
        true => Idempotency::Idempotent,
        false => Idempotency::Once,
    }
}

/// The operations that the door tells apart, where the protocol above HTTP shows one.
pub const OPERATIONS: &[&str] =
    &["git/fetch", "git/push", "graphql/query", "graphql/mutation", "graphql/subscription", "graphql/unknown"];

/// How a server is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheme {
    /// Without TLS.
    Http,
    /// Within TLS.
    Https,
}

impl Scheme {
    /// Both.
    pub const ALL: [Scheme; 2] = [Scheme::Http, Scheme::Https];

    /// Its name, as URLs have it.
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }

    /// The port that a URL of this scheme need not name: RFC 9110, sections 4.2.1 and 4.2.2.
    pub const fn default_port(self) -> u16 {
        match self {
            Scheme::Http => 80,
            Scheme::Https => 443,
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The arguments of `http/request`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The method as it was sent, its case kept.
    pub method: String,
    /// How the server is spoken to.
    pub scheme: Scheme,
    /// The server's name in its canonical form: lower case, no dot at the end, other scripts as the A-labels that were
    /// given; an IPv6 literal without brackets.
    pub host: String,
    /// The server's port.
    pub port: u16,
    /// The target as it was sent: path and query, starting with `/`; or `*`.
    pub path: String,
    /// What the request carries.
    pub body: Body,
    /// What the request does, where the protocol above HTTP says so: `git/fetch`, `git/push`, `graphql/query`,
    /// `graphql/mutation`, `graphql/subscription`, `graphql/unknown`.
    pub operation: Option<String>,
    /// The secrets whose placeholders it carries, and where: sorted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<SecretUse>,
}

/// A secret that a request carries.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SecretUse {
    /// Its name.
    pub name: String,
    /// Where its placeholder stands: `header:NAME`, `query:NAME`, `body`, or a place that no policy can name, `path`
    /// or `query`.
    pub place: String,
}

/// What a request carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "type")]
pub enum Body {
    /// Nothing.
    Empty,
    /// Content that the door held whole.
    Known {
        /// SHA-256 of the content.
        digest: Digest,
        /// Its length in bytes.
        size: u64,
    },
    /// Content that passes as it comes.
    Streamed {
        /// Its length in bytes, where the program announced one.
        announced: Option<u64>,
    },
}

impl Body {
    /// Its length in bytes as far as it is known before it has passed.
    pub fn bytes(&self) -> u64 {
        match self {
            Body::Empty => 0,
            Body::Known { size, .. } => *size,
            Body::Streamed { announced } => announced.unwrap_or(0),
        }
    }
}

/// Why a text is no URL of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a URL is http:// or https://, a host, and a path, as in `https://api.example.org/v1`")]
pub struct NotAUrl;

impl Request {
    /// A request of this method for this URL, without content. The host is folded to its form in effects; what follows a
    /// `#` is never sent and not taken.
    ///
    /// # Errors
    /// When the text is no URL of a request.
    pub fn parse(method: &str, url: &str) -> Result<Request, NotAUrl> {
        let (scheme, rest) = url.split_once("://").ok_or(NotAUrl)?;
        let known = |known: &Scheme| scheme.eq_ignore_ascii_case(known.name());
        let scheme = Scheme::ALL.into_iter().find(known).ok_or(NotAUrl)?;
        let rest = rest.split('#').next().unwrap_or_default();
        let (authority, target) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_not_a_port| NotAUrl)?),
            _ => (authority, scheme.default_port()),
        };
        let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        let host = bare.strip_suffix('.').unwrap_or(bare).to_ascii_lowercase();
        if host.is_empty() || method.is_empty() {
            return Err(NotAUrl);
        }
        let path = if target.starts_with('/') { target.to_owned() } else { format!("/{target}") };
        Ok(Request {
            method: method.to_owned(),
            scheme,
            host,
            port,
            path,
            body: Body::Empty,
            operation: None,
            secrets: Vec::new(),
        })
    }

    /// The URL: scheme, host, port unless it is the scheme's own, path and query. For the target `*` it ends after the
    /// authority (RFC 9110, section 7.1).
    pub fn url(&self) -> String {
        let path = if self.path == "*" { "" } else { &self.path };
        format!("{}{path}", self.origin())
    }

    /// Scheme and authority: the URL without its path and query.
    pub fn origin(&self) -> String {
        let host = super::net::bracketed(&self.host);
        match self.port == self.scheme.default_port() {
            true => format!("{}://{host}", self.scheme),
            false => format!("{}://{host}:{}", self.scheme, self.port),
        }
    }

    /// The resource of an effect with this request.
    pub fn resource(&self) -> Resource {
        Resource::Url { url: self.url() }
    }

    /// The target without its query.
    pub fn path_alone(&self) -> &str {
        self.path.split_once('?').map_or(&*self.path, |(path, _)| path)
    }
}
