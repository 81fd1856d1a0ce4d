//! Patterns of URLs: `scheme://host[:port]/path`.
//!
//! The scheme is `http`, `https` or `*`, the host one of [`HostPattern`] or `*`, the port the scheme's own unless it is
//! named, or `*`. In the path `*` matches within a segment and `**` any number of segments. The path is compared without
//! its query unless the pattern has a `?`; in a query `*` matches anything.
//!
//! Servers differ in what they make of some paths: `/a/../b`, `/a//b`, `/a%2fb`. Such a path is ambiguous. Nothing that
//! allows a part of a host allows it, and everything that restricts a part of the host restricts it.

use super::hosts::{Host, HostError, HostPattern};
use crate::effect::http::{Request, Scheme};
use globset::{GlobBuilder, GlobMatcher};
use std::{
    cmp::Ordering,
    fmt,
    sync::{Arc, OnceLock},
};

/// The path that stands for all of a host.
const EVERY_PATH: &str = "/**";

/// One pattern of URLs.
#[derive(Clone)]
pub struct UrlPattern {
    text: String,
    scheme: Option<Scheme>,
    host: Option<HostPattern>,
    port: Port,
    path: String,
    query: Option<String>,
    compiled: Arc<OnceLock<Compiled>>,
}

/// Which ports a pattern is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Port {
    /// The scheme's own.
    Default,
    /// Every one.
    Any,
    /// This one.
    Number(u16),
}

/// None where the globs could not be compiled; see [`UrlPattern::admits`] for what that means.
type Compiled = Option<Globs>;

struct Globs {
    path: GlobMatcher,
    query: Option<GlobMatcher>,
    /// The same with every percent-encoding undone, for what restricts.
    decoded: GlobMatcher,
}

/// Why a text is no pattern of URLs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// No scheme.
    #[error("a URL pattern starts with `https://`, `http://` or `*://`")]
    Scheme,
    /// No path.
    #[error("a URL pattern has a path: `/**` is every path of the host, `/` the root alone")]
    Path,
    /// Somebody's name in it.
    #[error("a URL pattern holds no user name and no password")]
    User,
    /// A port that is none.
    #[error("a port is a number from 1 to 65535, or `*`")]
    Port,
    /// A host that is none.
    #[error("its host: {0}")]
    Host(#[from] HostError),
    /// A path that servers read in more than one way.
    #[error(
        "its path has a `.` or `..`, an empty segment, a backslash, or an encoded `/`, `\\` or `.`, which servers \
             read differently, so no pattern can name it"
    )]
    Ambiguous,
    /// A character that no URL has.
    #[error("a URL has no white space, no `#` and only ASCII; other characters are written percent-encoded")]
    Character,
    /// Two stars within a segment.
    #[error("`**` is a whole segment: `/a/**`, not `/a**`")]
    Stars,
}

impl UrlPattern {
    /// Reads a pattern.
    ///
    /// # Errors
    /// Why it is none.
    pub fn parse(text: &str) -> Result<UrlPattern, UrlError> {
        let (scheme, rest) = text.split_once("://").ok_or(UrlError::Scheme)?;
        let scheme = match scheme.to_ascii_lowercase().as_str() {
            "*" => None,
            name => Some(Scheme::ALL.into_iter().find(|known| known.name() == name).ok_or(UrlError::Scheme)?),
        };
        let (authority, target) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        if authority.contains('@') {
            return Err(UrlError::User);
        }
        let (host, port) = split_port(authority).ok_or(UrlError::Port)?;
        let host = match host {
            "*" => None,
            host => Some(HostPattern::parse(host)?),
        };
        if text.bytes().any(|byte| !byte.is_ascii_graphic() || byte == b'#') {
            return Err(UrlError::Character);
        }
        let (path, query) = match target.split_once('?') {
            Some((path, query)) => (path, Some(query.to_owned())),
            None => (target, None),
        };
        if !path.starts_with('/') {
            return Err(UrlError::Path);
        }
        let path = normal_path(path).ok_or(UrlError::Ambiguous)?;
        if path.split('/').any(|segment| segment.contains("**") && segment != "**") {
            return Err(UrlError::Stars);
        }
        let pattern = UrlPattern { text: text.to_owned(), scheme, host, port, path, query, compiled: Arc::default() };
        Ok(pattern)
    }

    /// The pattern that matches this request's URL, query aside, and no other; none where its path is ambiguous.
    pub fn exactly(request: &Request) -> Option<String> {
        let path = request.path_alone();
        let plain = normal_path(path).is_some() && path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
        // A star in a path can only be named by its encoding, which is another spelling of the same.
        plain.then(|| format!("{}{}", request.origin(), path.replace('*', "%2A")))
    }

    /// The pattern as it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether it could match a URL of this host.
    pub fn is_about(&self, host: &Host) -> bool {
        self.host.as_ref().is_none_or(|pattern| pattern.matches(host))
    }

    /// Whether some host matches both it and this pattern.
    pub fn overlaps(&self, host: &HostPattern) -> bool {
        self.host.as_ref().is_none_or(|pattern| pattern.overlaps(host))
    }

    /// Whether some URL that it matches has one of these ports.
    pub fn has_port_among(&self, ports: &[u16]) -> bool {
        match (self.port, self.scheme) {
            (Port::Any, _) => true,
            (Port::Number(port), _) => ports.contains(&port),
            (Port::Default, Some(scheme)) => ports.contains(&scheme.default_port()),
            (Port::Default, None) => Scheme::ALL.iter().any(|scheme| ports.contains(&scheme.default_port())),
        }
    }

    /// Whether a rule that allows matches this request. An ambiguous path is matched by `/**` alone, and globs that do
    /// not compile match nothing.
    pub(super) fn admits(&self, host: &Host, request: &Request) -> bool {
        if !self.reaches(host, request) {
            return false;
        }
        let Some(path) = request_path(request) else {
            return self.path == EVERY_PATH && self.query.is_none();
        };
        self.globs().is_some_and(|globs| globs.path.is_match(&path) && globs.query_matches(request))
    }

    /// Whether a rule that restricts matches this request. An ambiguous path is matched by all of them, and globs that
    /// do not compile match everything.
    pub(super) fn restricts(&self, host: &Host, request: &Request) -> bool {
        if !self.reaches(host, request) {
            return false;
        }
        let (Some(path), Some(globs)) = (request_path(request), self.globs()) else { return true };
        let decoded = || globs.decoded.is_match(decode(&path));
        (globs.path.is_match(&path) || decoded()) && globs.query_matches(request)
    }

    fn reaches(&self, host: &Host, request: &Request) -> bool {
        self.is_about(host)
            && self.scheme.is_none_or(|scheme| scheme == request.scheme)
            && match self.port {
                Port::Any => true,
                Port::Default => request.port == request.scheme.default_port(),
                Port::Number(port) => request.port == port,
            }
    }

    fn globs(&self) -> Option<&Globs> {
        let compile = || {
            let path = glob(&self.path, Stars::WithinSegments)?;
            let decoded = glob(&decode(&self.path), Stars::WithinSegments)?;
            let query = self.query.as_deref().map(|query| glob(query, Stars::Everywhere).ok_or(()));
            Some(Globs { path, decoded, query: query.transpose().ok()? })
        };
        self.compiled.get_or_init(compile).as_ref()
    }
}

impl Globs {
    fn query_matches(&self, request: &Request) -> bool {
        let query = request.path.split_once('?').map_or("", |(_, query)| query);
        self.query.as_ref().is_none_or(|pattern| pattern.is_match(query))
    }
}

/// What a star matches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stars {
    /// No slash, unless it is `**`.
    WithinSegments,
    /// Anything.
    Everywhere,
}

/// Everything but a star stands for itself.
fn glob(text: &str, stars: Stars) -> Option<GlobMatcher> {
    let escaped = globset::escape(&text.replace('\\', "\\\\")).replace("[*]", "*");
    let glob =
        GlobBuilder::new(&escaped).literal_separator(stars == Stars::WithinSegments).backslash_escape(true).build();
    glob.ok().map(|glob| glob.compile_matcher())
}

fn split_port(authority: &str) -> Option<(&str, Port)> {
    let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((inner, "")) => (&authority[..inner.len() + 2], None),
        Some((inner, port)) => (&authority[..inner.len() + 2], Some(port.strip_prefix(':')?)),
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    Some((
        host,
        match port {
            None => Port::Default,
            Some("*") => Port::Any,
            Some(number) => Port::Number(port_number(number)?),
        },
    ))
}

/// A port in digits alone, from 1.
pub fn port_number(text: &str) -> Option<u16> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|port| digits && *port > 0)
}

/// A path, without its query, in the form in which equal ones are equal: what RFC 3986, section 2.3, calls unreserved
/// is not encoded, and the digits of encodings are upper case (section 6.2.2). None where servers read it in more than
/// one way.
fn normal_path(path: &str) -> Option<String> {
    let rest = path.strip_prefix('/')?;
    let mut normal = String::with_capacity(path.len());
    let last = rest.split('/').count() - 1;
    for (place, segment) in rest.split('/').enumerate() {
        normal.push('/');
        // Only the last segment may be empty: the slash at the end of a path.
        if segment.is_empty() && place < last {
            return None;
        }
        let mut bytes = segment.bytes();
        while let Some(byte) = bytes.next() {
            match byte {
                b'%' => {
                    let digit = |byte: Option<u8>| (byte? as char).to_digit(16);
                    let (high, low) = (digit(bytes.next())?, digit(bytes.next())?);
                    let decoded = u8::try_from(high * 16 + low).ok()?;
                    match decoded {
                        // An encoded percent sign may be decoded once more further on; a zero byte may end the path.
                        b'/' | b'\\' | b'.' | b'%' | 0 => return None,
                        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'~' => normal.push(decoded as char),
                        other => normal.push_str(&format!("%{other:02X}")),
                    }
                }
                b'\\' | 0..=0x20 | 0x7f..=0xff => return None,
                byte => normal.push(byte as char),
            }
        }
        // Some servers cut off what follows a semicolon before they look for dots.
        let name = segment.split(';').next().unwrap_or_default();
        if matches!(name, "." | "..") || (name.is_empty() && !segment.is_empty()) {
            return None;
        }
    }
    Some(normal)
}

/// A request's path in its one form. A star in it is written as its encoding, which is how a pattern names one.
fn request_path(request: &Request) -> Option<String> {
    normal_path(request.path_alone()).map(|path| path.replace('*', "%2A"))
}

/// A normal path with every encoding undone; bytes that are not UTF-8 are replaced.
fn decode(path: &str) -> String {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.bytes();
    while let Some(byte) = rest.next() {
        let digit = |byte: Option<u8>| (byte? as char).to_digit(16);
        match byte {
            b'%' => match (digit(rest.next()), digit(rest.next())) {
                (Some(high), Some(low)) => bytes.push((high * 16 + low) as u8),
                _ => bytes.push(b'%'),
            },
            byte => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl PartialEq for UrlPattern {
    fn eq(&self, other: &UrlPattern) -> bool {
        self.text == other.text
    }
}

impl Eq for UrlPattern {}

impl PartialOrd for UrlPattern {
    fn partial_cmp(&self, other: &UrlPattern) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for UrlPattern {
    fn cmp(&self, other: &UrlPattern) -> Ordering {
        self.text.cmp(&other.text)
    }
}

impl fmt::Debug for UrlPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::effect::tests::request_of;
    use proptest::prelude::*;

    fn pattern(text: &str) -> UrlPattern {
        UrlPattern::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn admits(text: &str, url: &str) -> bool {
        let request = request_of("GET", url, b"");
        pattern(text).admits(&Host::parse(&request.host).unwrap(), &request)
    }

    fn restricts(text: &str, url: &str) -> bool {
        let request = request_of("GET", url, b"");
        pattern(text).restricts(&Host::parse(&request.host).unwrap(), &request)
    }

    #[test]
    fn a_url_is_matched_by_scheme_host_port_and_path() {
        for (text, url, expected) in [
            ("https://api.test/**", "https://api.test/", true),
            ("https://api.test/**", "https://api.test/a/b?c=d", true),
            ("https://api.test/**", "http://api.test/", false),
            ("https://api.test/**", "https://api.test:8443/", false),
            ("https://api.test:8443/**", "https://api.test:8443/", true),
            ("https://api.test:443/**", "https://api.test/", true),
            ("https://api.test:*/**", "https://api.test:8443/", true),
            ("*://api.test/**", "http://api.test/", true),
            ("*://api.test/**", "http://api.test:443/", false),
            ("https://*/**", "https://other.test/", true),
            ("https://*.test/**", "https://api.test/", true),
            ("https://*.test/**", "https://test/", false),
            ("HTTPS://API.test./**", "https://api.test/", true),
            ("https://[::1]:8443/**", "https://[::1]:8443/a", true),
            ("https://api.test/", "https://api.test/", true),
            ("https://api.test/", "https://api.test/a", false),
            ("https://api.test/v1/*", "https://api.test/v1/a", true),
            ("https://api.test/v1/*", "https://api.test/v1/a/b", false),
            ("https://api.test/v1/**", "https://api.test/v1", false),
            ("https://api.test/v1/**", "https://api.test/v1/", true),
            ("https://api.test/v1/**", "https://api.test/v10/a", false),
            ("https://api.test/**/x", "https://api.test/x", true),
            ("https://api.test/**/x", "https://api.test/a/b/x", true),
            ("https://api.test/a", "https://api.test/A", false),
            ("https://api.test/a", "https://api.test/a?b", true),
            ("https://api.test/a?b=*", "https://api.test/a?b=c/d", true),
            ("https://api.test/a?b=*", "https://api.test/a", false),
            ("https://api.test/a?*", "https://api.test/a", true),
            ("https://api.test/a?", "https://api.test/a?b", false),
            ("https://api.test/{a,b}[c]", "https://api.test/{a,b}[c]", true),
            ("https://api.test/{a,b}", "https://api.test/a", false),
            ("https://api.test/%61%2b", "https://api.test/a%2B", true),
            ("https://api.test/a", "https://api.test/%61", true),
        ] {
            assert_eq!(admits(text, url), expected, "{text} on {url}");
            assert!(!expected || restricts(text, url), "{text} on {url}");
        }
    }

    #[test]
    fn what_servers_read_differently_is_allowed_by_everything_alone_and_restricted_by_any_part() {
        for path in [
            "/v1/../admin",
            "/v1/./a",
            "/v1//a",
            "//a",
            "/v1/a%2fb",
            "/v1/a%5Cb",
            "/v1/%2e%2e/a",
            "/v1/a\\b",
            "/v1/..;/a",
            "/v1/;/a",
            "/v1/a%00",
            "/v1/a%252fb",
            "/v1/a%",
            "/v1/a%zz",
            "/v1/..",
            "/v1/.",
            "/v1/a%2eb",
            "/v1/\u{e9}",
            "/v1/a b",
        ] {
            let url = format!("https://api.test{path}");
            assert!(!admits("https://api.test/v1/**", &url), "{path}");
            assert!(admits("https://api.test/**", &url), "{path}");
            assert!(restricts("https://api.test/nowhere", &url), "{path}");
            assert!(!restricts("https://other.test/**", &url), "{path}");
            assert!(!admits("https://api.test/**?a", &url), "{path}");
        }
    }

    #[test]
    fn a_restriction_is_not_avoided_by_another_spelling() {
        for path in ["/admin", "/%61dmin", "/%61%64%6D%69%6e", "/admin?x"] {
            assert!(restricts("https://api.test/admin", &format!("https://api.test{path}")), "{path}");
        }
        assert!(restricts("https://api.test/a+b", "https://api.test/a%2Bb"));
        assert!(restricts("https://api.test/a%2Bb", "https://api.test/a+b"));
        assert!(!admits("https://api.test/a+b", "https://api.test/a%2Bb"));
    }

    #[test]
    fn the_asterisk_target_is_a_request_about_all_of_a_server() {
        let request = Request { path: "*".into(), ..request_of("OPTIONS", "https://api.test/", b"") };
        let host = Host::parse("api.test").unwrap();
        assert!(pattern("https://api.test/**").admits(&host, &request));
        assert!(!pattern("https://api.test/*").admits(&host, &request));
        assert!(pattern("https://api.test/x").restricts(&host, &request));
    }

    #[test]
    fn texts_that_are_no_url_patterns_say_why() {
        for (text, error) in [
            ("api.test/x", UrlError::Scheme),
            ("ftp://api.test/", UrlError::Scheme),
            ("https://api.test", UrlError::Path),
            ("https://api.test?x", UrlError::Path),
            ("https://a@api.test/", UrlError::User),
            ("https://api.test:0/", UrlError::Port),
            ("https://api.test:+1/", UrlError::Port),
            ("https://api.test:65536/", UrlError::Port),
            ("https://api.test:/", UrlError::Port),
            ("https:///x", UrlError::Host(HostError::Empty)),
            ("https://127.1/x", UrlError::Host(HostError::OddAddress)),
            ("https://a.*/x", UrlError::Host(HostError::Star)),
            ("https://api.test/a/../b", UrlError::Ambiguous),
            ("https://api.test//b", UrlError::Ambiguous),
            ("https://api.test/%2F", UrlError::Ambiguous),
            ("https://api.test/a b", UrlError::Character),
            ("https://api.test/a#b", UrlError::Character),
            ("https://api.test/\u{e9}", UrlError::Character),
            ("https://api.test/a**", UrlError::Stars),
        ] {
            assert_eq!(UrlPattern::parse(text), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_named_exactly_matches_itself_and_nothing_else(
            path in "(/[a-c*%.{}\\[\\]!?+-]{0,3}){1,3}", other in "(/[a-c*]{0,3}){1,3}",
        ) {
            let request = request_of("GET", &format!("https://api.test{path}"), b"");
            let host = Host::parse("api.test").unwrap();
            if let Some(text) = UrlPattern::exactly(&request) {
                prop_assert!(pattern(&text).restricts(&host, &request), "{text}");
                let other = request_of("GET", &format!("https://api.test{other}"), b"");
                if let (Some(one), Some(other_path)) = (normal_path(request.path_alone()), normal_path(other.path_alone())) {
                    if decode(&one) != decode(&other_path) {
                        prop_assert!(!pattern(&text).admits(&host, &other), "{text} admits {}", other.path);
                    }
                }
            } else {
                prop_assert!(normal_path(request.path_alone()).is_none());
            }
        }

        #[test]
        fn nothing_panics_and_what_is_allowed_narrowly_is_also_restricted(text in "\\PC{0,24}", path in "/\\PC{0,16}") {
            let url = format!("https://api.test{path}");
            if let Ok(pattern) = UrlPattern::parse(&format!("https://api.test/{text}")) {
                let request = request_of("GET", &url, b"");
                let host = Host::parse("api.test").unwrap();
                prop_assert!(!pattern.admits(&host, &request) || pattern.restricts(&host, &request));
            }
        }
    }
}
