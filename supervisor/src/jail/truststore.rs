//! A Java key store that holds certificates to trust and nothing else.
//!
//! In the older of Java's two formats (JKS), which every JDK reads at the place of its `cacerts`. The newer one,
//! PKCS#12, would be read there only by some: clients open that file without a password, and its certificates are
//! encrypted unless the JDK knows a convention of its own. Written here because entries without keys take a dozen lines,
//! and the crates that have the format bring keys, ciphers and random numbers with it.

use rustls_pki_types::{pem::PemObject, CertificateDer};
use sha1::{Digest, Sha1};

// The JDK's sun.security.provider.JavaKeyStore: the layout of `engineStore` and the constants of its head.
const MAGIC: u32 = 0xfeed_feed;
const VERSION: u32 = 2;
const TRUSTED_CERTIFICATE: u32 = 2;
/// Stirred into the checksum by every implementation.
const WHITENER: &[u8] = b"Mighty Aphrodite";
/// The password by which the checksum is made, which every JDK's own `cacerts` has and no client needs to know.
const PASSWORD: &str = "changeit";

/// The key store of these certificates. What is not a certificate in PEM is passed over.
pub fn java(pem: &[u8]) -> Vec<u8> {
    let certificates: Vec<CertificateDer> = CertificateDer::pem_slice_iter(pem).filter_map(Result::ok).collect();
    let mut store = Vec::with_capacity(pem.len());
    store.extend(MAGIC.to_be_bytes());
    store.extend(VERSION.to_be_bytes());
    store.extend((certificates.len() as u32).to_be_bytes());
    for (number, certificate) in certificates.iter().enumerate() {
        store.extend(TRUSTED_CERTIFICATE.to_be_bytes());
        put_text(&mut store, &format!("tollgate-{number}"));
        // The day of its making, in milliseconds: none, so that equal certificates make equal stores.
        store.extend(0_u64.to_be_bytes());
        put_text(&mut store, "X.509");
        store.extend((certificate.len() as u32).to_be_bytes());
        store.extend(certificate.as_ref());
    }
    let mut checksum = Sha1::new();
    checksum.update(PASSWORD.encode_utf16().flat_map(u16::to_be_bytes).collect::<Vec<u8>>());
    checksum.update(WHITENER);
    checksum.update(&store);
    store.extend(checksum.finalize());
    store
}

/// `DataOutputStream.writeUTF` of text in ASCII: its length and itself.
fn put_text(store: &mut Vec<u8>, text: &str) {
    store.extend((text.len() as u16).to_be_bytes());
    store.extend(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jail::certificates;
    use std::process::Command;

    #[test]
    fn a_store_of_nothing_has_the_checksum_of_its_head() {
        let store = java(b"no certificate here");
        assert_eq!(&store[..12], [0xfe, 0xed, 0xfe, 0xed, 0, 0, 0, 2, 0, 0, 0, 0]);
        assert_eq!(store.len(), 12 + 20);
    }

    #[test]
    fn java_reads_the_store_and_finds_every_certificate_of_the_host_in_it() {
        let Some(bundle) = certificates::host_bundle() else { return };
        let wanted = bundle.windows(27).filter(|part| *part == b"-----BEGIN CERTIFICATE-----").count();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cacerts");
        std::fs::write(&path, java(&bundle)).unwrap();
        let listed = Command::new("keytool").args(["-list", "-storepass", PASSWORD, "-keystore"]).arg(&path).output();
        let Ok(listed) = listed else {
            assert!(std::env::var_os("TOLLGATE_JAVA_MUST_WORK").is_none(), "there is no keytool");
            return eprintln!("skipped: there is no keytool");
        };
        let text = String::from_utf8_lossy(&listed.stdout);
        assert!(listed.status.success(), "{text}");
        assert_eq!(text.matches("trustedCertEntry").count(), wanted, "{text}");
    }
}
