//! Where programs look for the certificates they trust, and how a run's own authority gets there.
//!
//! A run with a network has an authority of its own, whose certificate the program has to trust. No client is asked to
//! change its settings: the files that clients read by themselves hold it beside what the host trusts, and the
//! variables name those files for clients that bring a list of their own. The authority's key is never in the jail.

use super::{
    spec::{Bind, OWN},
    truststore,
};
use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs,
    os::unix::{ffi::OsStringExt, fs::MetadataExt},
    path::{Path, PathBuf},
};
use tollgate_shim::protocol::{Access, Bytes, Mount};

/// The certificates that the program trusts, all of them in one file.
pub const BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
/// The folder of certificates, one a file.
const FOLDER: &str = "/etc/ssl/certs";
/// The certificates that Java trusts.
const JAVA: &str = "/etc/ssl/certs/java/cacerts";
/// The run's own authority, alone.
const AUTHORITY: &str = "authority.pem";
/// Where distributions have their bundle: Debian and Alpine, Fedora, SUSE, Alpine and the BSDs. The first is read, and
/// all but it lead to it in the jail.
const BUNDLES: [&str; 6] = [
    BUNDLE,
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/cert.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// Where Fedora's JDK looks.
const JAVA_TOO: &str = "/etc/pki/ca-trust/extracted/java/cacerts";
/// The folders that are made anew, and those above them: a view of the host's would leave no room.
const MADE: [&str; 6] =
    ["/etc/ssl", FOLDER, "/etc/pki", "/etc/pki/tls", "/etc/pki/tls/certs", "/etc/pki/ca-trust/extracted/pem"];
/// A host's folder of certificates has some hundreds of entries; past this it is something else.
const MOST_ENTRIES: usize = 2_000;
/// No certificate is longer than this.
const MOST_BYTES: u64 = 64 * 1024;

/// Variables that name the bundle for clients that would use another: OpenSSL and all that is built on it, Go, requests
/// and pip, which bring a list of their own, curl, git, cargo, the AWS tools and Nix.
const NAME_THE_BUNDLE: [&str; 8] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
    "PIP_CERT",
    "AWS_CA_BUNDLE",
    "NIX_SSL_CERT_FILE",
];
/// Variables that name certificates to trust beside a built-in list: Node and Deno.
const NAME_THE_AUTHORITY: [&str; 2] = ["NODE_EXTRA_CA_CERTS", "DENO_CERT"];
/// Variables that would lead a program to a proxy, which a jail cannot reach, past the network that it has.
const PROXIES: [&str; 4] = ["http_proxy", "https_proxy", "all_proxy", "no_proxy"];

/// The variables of a run with a network.
pub fn variables() -> Vec<(OsString, OsString)> {
    let bundle = NAME_THE_BUNDLE.iter().map(|name| (name.into(), BUNDLE.into()));
    let authority = Path::new(OWN).join(AUTHORITY);
    bundle.chain(NAME_THE_AUTHORITY.iter().map(|name| (name.into(), authority.clone().into()))).collect()
}

/// Whether a variable of the caller's would lead to a proxy. Clients read these in capitals and in small letters.
pub fn names_a_proxy(variable: &OsString) -> bool {
    variable.to_str().is_some_and(|name| PROXIES.iter().any(|proxy| proxy.eq_ignore_ascii_case(name)))
}

/// Whether what is shown at this path is made anew for a run with a network, so that the host's is not.
pub fn is_made(target: &Path) -> bool {
    MADE.iter().any(|made| target == Path::new(made))
        || BUNDLES.iter().chain([&JAVA, &JAVA_TOO]).any(|made| target == Path::new(made))
}

/// What the host trusts, in PEM; none if it has no list that everybody may read.
pub fn host_bundle() -> Option<Vec<u8>> {
    BUNDLES.iter().find_map(|path| readable(Path::new(path), u64::MAX))
}

/// Whether there is a Java on this host that reads its certificates from where we can put them.
pub fn has_java() -> bool {
    [JAVA, JAVA_TOO, "/usr/lib/jvm"].iter().any(|path| Path::new(path).exists())
}

/// The list for Java, of what the host trusts and the authority; none where no Java would read it.
pub fn java_truststore(authority_pem: &[u8]) -> Option<Vec<u8>> {
    has_java().then(|| truststore::java(&[authority_pem, &host_bundle().unwrap_or_default()].concat()))
}

/// The files and links of the jail's /etc by which programs find what they trust.
pub fn mounts(authority_pem: &[u8], java_truststore: Option<&[u8]>, views: &[Bind]) -> Vec<Mount> {
    let mut taken: BTreeSet<PathBuf> = views.iter().map(|view| view.target.clone()).collect();
    let mut all = Vec::new();
    let mut add = |mount: Mount, target: &Path| {
        if taken.insert(target.to_owned()) {
            all.push(mount);
        }
    };
    let mut bundle = host_bundle().unwrap_or_default();
    if bundle.last().is_some_and(|last| *last != b'\n') {
        bundle.push(b'\n');
    }
    bundle.extend(authority_pem);
    add(file(BUNDLE, bundle), Path::new(BUNDLE));
    match java_truststore {
        Some(store) => add(file(JAVA, store.to_vec()), Path::new(JAVA)),
        None if Path::new(JAVA).is_file() => {
            let mount =
                Mount::Bind { source: JAVA.into(), target: JAVA.into(), access: Access::ReadOnly, optional: true };
            add(mount, Path::new(JAVA));
        }
        None => {}
    }
    for other in &BUNDLES[1..] {
        add(link(other, BUNDLE.into()), Path::new(other));
    }
    if java_truststore.is_some() {
        add(link(JAVA_TOO, JAVA.into()), Path::new(JAVA_TOO));
    }
    for entry in fs::read_dir(FOLDER).into_iter().flatten().flatten().take(MOST_ENTRIES) {
        let path = entry.path();
        let Some(target) = path.to_str() else { continue };
        match entry.file_type() {
            Ok(kind) if kind.is_symlink() => {
                if let Ok(to) = fs::read_link(&path) {
                    add(link(target, to.into()), &path);
                }
            }
            Ok(kind) if kind.is_file() => {
                if let Some(content) = readable(&path, MOST_BYTES) {
                    add(file(target, content), &path);
                }
            }
            Ok(_) | Err(_) => {}
        }
    }
    all
}

/// The authority's certificate alone, for clients that add it to a list of their own.
pub fn authority(authority_pem: &[u8]) -> Mount {
    file(&format!("{OWN}/{AUTHORITY}"), authority_pem.to_vec())
}

fn file(target: &str, content: Vec<u8>) -> Mount {
    Mount::File { target: target.into(), content: Bytes::from(OsString::from_vec(content)), mode: 0o644 }
}

fn link(target: &str, to: Bytes) -> Mount {
    Mount::Symlink { target: target.into(), to }
}

/// The content of a file that everybody may read, whoever asks: root's runs show no more than anybody's.
fn readable(path: &Path, most: u64) -> Option<Vec<u8>> {
    let found = fs::metadata(path).ok()?;
    let everybody = found.mode() & 0o004 != 0;
    (found.is_file() && found.len() <= most && everybody).then(|| fs::read(path).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEM: &[u8] = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";

    fn content_of(mounts: &[Mount], path: &str) -> Option<Vec<u8>> {
        mounts.iter().find_map(|mount| match mount {
            Mount::File { target, content, .. } if *target == Bytes::from(path) => {
                Some(content.to_os().into_encoded_bytes())
            }
            _ => None,
        })
    }

    #[test]
    fn the_bundle_holds_what_the_host_trusts_and_then_the_authority() {
        let mounts = mounts(PEM, None, &[]);
        let bundle = content_of(&mounts, BUNDLE).unwrap();
        assert!(bundle.starts_with(&host_bundle().unwrap_or_default()));
        assert!(bundle.ends_with(PEM));
    }

    #[test]
    fn no_path_is_made_twice_and_a_users_view_of_one_is_left_alone() {
        let target = PathBuf::from("/etc/ssl/cert.pem");
        let presence = crate::jail::spec::Presence::Required;
        let view = Bind { source: target.clone(), target: target.clone(), access: Access::ReadOnly, presence };
        let mounts = mounts(PEM, Some(b"store"), &[view]);
        let targets: Vec<Bytes> = mounts
            .iter()
            .map(|mount| match mount {
                Mount::File { target, .. } | Mount::Symlink { target, .. } => target.clone(),
                other => panic!("neither file nor link: {other:?}"),
            })
            .collect();
        assert_eq!(targets.iter().collect::<BTreeSet<_>>().len(), targets.len());
        assert!(!targets.contains(&Bytes::from(target)));
        assert_eq!(content_of(&mounts, JAVA).as_deref(), Some(&b"store"[..]));
    }

    #[test]
    fn proxies_are_known_in_capitals_too() {
        for name in ["http_proxy", "HTTPS_PROXY", "No_Proxy", "ALL_PROXY"] {
            assert!(names_a_proxy(&name.into()), "{name}");
        }
        assert!(!names_a_proxy(&"PROXY".into()));
    }
}
