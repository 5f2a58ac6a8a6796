from smolbuild.core.events import silent
from smolbuild.core.home import Home
from smolbuild.trust.keyring import obtain_signer, signing_key, trusted_keys


def test_the_key_is_made_on_first_use_and_trusted(tmp_path):
    home = Home(tmp_path)
    events = []
    signer = obtain_signer(home, None, events.append)
    assert signing_key(home).stat().st_mode & 0o777 == 0o600
    assert obtain_signer(home, None, events.append).public == signer.public
    assert len(events) == 1
    assert trusted_keys(home) == {signer.public.hint: signer.public}


def test_a_public_half_that_got_lost_is_written_again(tmp_path):
    home = Home(tmp_path)
    signer = obtain_signer(home, None, silent)
    signing_key(home).with_suffix(".pub").unlink()
    obtain_signer(home, None, silent)
    assert trusted_keys(home) == {signer.public.hint: signer.public}
